"""The most frequent words of European languages: a text without them is not running text of its language."""

from __future__ import annotations

STOP_WORDS: dict[str, str] = {
    "en": "the be to of and that have with is was for it in he his as on",
    "de": "der die das und in den von zu mit sich des auf für ist im dem nicht ein eine als auch es an",
    "fr": "le la les de des et un une du que qui dans pour pas est au en sur il ce",
    "es": "el la los las de que y en un una por con para se del es al lo no su",
    "it": "il la di che e un una in del per non si con le della è da i al dei",
    "pt": "o a os as de que e um uma em do da para com não se por no na dos",
    "nl": "de het een van en in is dat op te zijn met voor niet die aan er om ook als",
    "pl": "i w na z do się nie że to jest o jak po przez od dla są ale oraz za",
    "cs": "a v na se je že s z do o to i pro jako za ale by od po který",
    "sk": "a v na sa je že s z do o to aj pre ako za ale by od po ktorý",
    "sv": "och i att det som en på är av för med till den inte om ett de har var jag",
    "da": "og i at det er en på til af for med den der ikke de som et har var jeg",
    "no": "og i det er en på til av for med som at den ikke de et har var jeg om",
    "fi": "ja on ei että se oli hän mutta ovat joka kun niin myös tai kuin ole sen olla jos mitä",
    "et": "ja on ei et see oli ta aga kes mis ka kui või oma siis nagu ning seda pole mida",
    "hu": "a az és hogy nem is egy ez van de meg csak volt mint ha már még el azt ki",
    "ro": "și de la în a o un cu pe care nu este din să mai pentru se că ca ce ши де ла ын а ку каре ну есте дин сэ май пентру кэ че",
    "bg": "и на да се в за не от с че е са по но като до ще как това към",
    "hr": "i u je se na da su za od s ne što kao ili koji o iz ali bi po",
    "sl": "in je v na se da so za z ne ki pa kot ali tudi od po iz bi če",
    "lt": "ir kad į yra su iš o tai kaip bet buvo už jis apie ar nuo nes tik dar po",
    "lv": "un ir ka ar no par uz kas bet to arī kā tas vai tika nav lai pie pēc jau",
    "el": "και το να του η της με για που την τα στο από είναι δεν τον ο οι των θα",
    "ru": "и в не на что с он как это по но из у за от так же для то все",
    "uk": "і в не на що з та як це до у за від але для по так він його й",
    "tr": "ve bir bu için da de ile çok ne daha olarak gibi kadar olan var en ama her ki o",
    "ga": "an na a agus i ar ag is go le do sé ní bhí ach sin mé tá leis",
    "mt": "li ta u il l f għal ma minn din dan kien jew fuq hija bil kull dawn huwa biex",
    "ca": "el la els les de que i en un una per amb no es del al a és com més",
    "eu": "eta da ez du bat ere zen dira baina izan hori dute dela egin beste ditu edo zuen bere hau",
    "gl": "o a os as de que e un unha en do da para con non se por no na dos",
}
"""Label of a language (common/languages.py) -> words, separated by spaces; Romanian in both scripts."""
